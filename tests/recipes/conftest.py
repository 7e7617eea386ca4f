"""What the recipes' tests share: the check that a resumed run is the run."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tileweave.script.run import Run, local_welcome


@pytest.fixture
def check_resume() -> Any:
    """`check(train, config, data, folder)`: four steps at a stretch, or two, a checkpoint, and two; the same losses."""

    def check(train: Any, config: Any, data: str | None, folder: Path) -> None:
        whole = list(train(Run(local_welcome(4, data)), config))
        welcome = local_welcome(4, data, str(folder))
        run = Run(welcome)
        first = list(islice(train(run, config), 2))
        run.finish()
        [checkpoint] = folder.iterdir()
        second = list(train(Run(msgspec.structs.replace(welcome, resume=str(checkpoint))), config))
        assert len(first) == len(second) == 2
        assert first + second == whole

    return check
