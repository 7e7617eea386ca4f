"""The command `tileweave`: serve, submit, run, jobs, volunteer, simulate, demo, bench.

The idea: this file only reads options and prints; every command imports what it needs when it runs, so that `--help`
is quick and a volunteer never loads the server. With `--json` a command prints one JSON object on standard output and
nothing else; progress and logs go to standard error. Exit status: 0 done, 1 could not, 2 wrong options.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from backend.settings import Settings
    from tileweave.rest import Client

URL_DEFAULT = "http://127.0.0.1:8000"

app = typer.Typer(
    name="tileweave",
    help="Trains PyTorch models on volunteers' browsers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
jobs_app = typer.Typer(no_args_is_help=True, help="List, show, cancel jobs, and fetch what they made.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure; prints what the README shows.")
app.add_typer(jobs_app, name="jobs")
app.add_typer(bench_app, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else.")]
Wire = Annotated[str, typer.Option(help="How the job's numbers travel: f32, bf16, f16 or int8.")]
Url = Annotated[str, typer.Option("--url", envvar="TILEWEAVE_URL", help="The server.")]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="TILEWEAVE_ADMIN_TOKEN",
        help="The admin token; by default the one in this machine's data directory.",
        show_default=False,
    ),
]


def main() -> None:
    """The entry point of the command."""
    app()


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where jobs, credit and the token are kept.")] = None,
    gateways: Annotated[int | None, typer.Option(help="Gateway processes.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate; with --tls-key the server is https.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key.")] = None,
) -> None:
    """Run the server until Ctrl-C. Every setting can also be given as TILEWEAVE_…, see backend/settings.py."""
    from pydantic import ValidationError

    from backend.settings import Settings
    from backend.supervisor.serve import serve as run

    given: dict[str, Any] = {
        "host": host, "port": port, "data_dir": data_dir, "gateways": gateways, "tls_cert": tls_cert,
        "tls_key": tls_key,
    }  # fmt: skip
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
        _check_tls(settings)
    except ValidationError as error:
        _fail("settings: " + "; ".join(_complaint(one) for one in error.errors()), 2)
    except OSError as error:
        _fail(f"the TLS certificate or key cannot be used: {error}; give both as PEM files", 2)
    raise typer.Exit(run(settings))


@app.command()
def submit(
    recipe: Annotated[
        str | None, typer.Argument(help="The recipe: gpt-bytes, llama, lora, mlp, cnn or vit.", show_default=False)
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps; by default the recipe's.", show_default=False)] = None,
    config: Annotated[str, typer.Option(help="The recipe's settings as a JSON object.")] = "{}",
    gemm: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Multiply two .npy or .safetensors files instead.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A file or folder in the server's datasets folder; by default the recipe's own.", show_default=False
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="A name for people.")] = "",
    mode: Annotated[str, typer.Option(help="How the work is shared out; tiles is the only way.")] = "tiles",
    accuracy: Annotated[
        str,
        typer.Option(
            help="What products are checked for: rowwise, or normwise, which lets devices use faster algorithms "
            "(Strassen's) whose errors are small beside the largest elements only."
        ),
    ] = "rowwise",
    wire: Wire = "f32",
    url: Url = URL_DEFAULT,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Submit a job."""
    if (recipe is None) == (gemm is None):
        _fail("give a recipe, or --gemm A B", 2)
    try:
        settings = json.loads(config)
    except json.JSONDecodeError as error:
        _fail(f"--config: got {config}, expected a JSON object such as '{{\"layers\": 4}}': {error}", 2)
    if not isinstance(settings, dict):
        _fail(f"--config: got {config}, expected a JSON object such as '{{\"layers\": 4}}'", 2)
    with _client(url, token) as client:
        if gemm is not None:
            job = _answer(lambda: client.submit_gemm(gemm[0], gemm[1], name, accuracy, wire))
        else:
            assert recipe is not None
            job = _answer(lambda: client.submit_train(recipe, settings, steps, mode, name, data, accuracy, wire))
    _print(job, as_json, f"job {job['id']}: {url}/jobs/{job['id']}")


@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python file, or with -m a module; then its own arguments.")],
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name.")] = False,
    name: Annotated[str, typer.Option(help="A name for people.")] = "",
    steps: Annotated[int, typer.Option(min=0, help="How many steps it makes, for the progress; 0: not known.")] = 0,
    accuracy: Annotated[str, typer.Option(help="What products are checked for: rowwise or normwise.")] = "rowwise",
    wire: Wire = "f32",
    url: Url = URL_DEFAULT,
    token: Token = None,
) -> None:
    """Run a PyTorch script of your own, unmodified, with its GEMMs on the server's devices.

    The server must run on this machine, as the same user: operands go through shared memory."""
    from backend.run import run_script

    if not module and not Path(script).is_file():
        _fail(f"got {script}, expected a Python file, or -m and the name of a module", 2)
    with _client(url, token) as client:
        job = _answer(lambda: client.submit_run(name or Path(script).name, steps, accuracy, wire))
        print(f"job {job['id']}: {url}/jobs/{job['id']}", file=sys.stderr)
        command = ["-m", script] if module else [script]
        try:
            status = run_script(client, job["id"], [*command, *context.args])
        except (OSError, RuntimeError) as error:
            _fail(str(error), 1)
    raise typer.Exit(status)


@jobs_app.command("list")
def jobs_list(
    state: Annotated[str | None, typer.Option(help="Only those, e.g. running.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, max=100)] = 20,
    url: Url = URL_DEFAULT,
    as_json: Json = False,
) -> None:
    """The newest jobs."""
    with _client(url, None) as client:
        rows = _answer(lambda: client.jobs(state=state, limit=limit))
    _print({"jobs": rows}, as_json, "\n".join(_line(job) for job in rows) or "no jobs")


@jobs_app.command("show")
def jobs_show(job: str, url: Url = URL_DEFAULT, as_json: Json = False) -> None:
    """One job."""
    with _client(url, None) as client:
        found = _answer(lambda: client.job(job))
    _print(found, as_json, _line(found) + (f"\n{found['reason']}" if found["reason"] else ""))


@jobs_app.command("download")
def jobs_download(job: str, path: Path, url: Url = URL_DEFAULT, token: Token = None, as_json: Json = False) -> None:
    """Fetch what a job made: the product of a gemm job (.npy), the last checkpoint of a training job (.safetensors)."""
    with _client(url, token) as client:
        kind = _answer(lambda: client.job(job))["kind"]
        fetch = client.download_result if kind == "gemm" else client.download_checkpoint
        size = _answer(lambda: fetch(job, path))
    _print({"job": job, "path": str(path), "bytes": size}, as_json, f"{size:,} bytes in {path}")


@jobs_app.command("cancel")
def jobs_cancel(job: str, url: Url = URL_DEFAULT, token: Token = None, as_json: Json = False) -> None:
    """End a job."""
    with _client(url, token) as client:
        found = _answer(lambda: client.cancel(job))
    _print(found, as_json, _line(found))


@app.command()
def volunteer(
    url: Url = URL_DEFAULT,
    name: Annotated[str, typer.Option(help="Shown on the leaderboard.")] = "",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Tiles at a time; by default one for each CPU.", show_default=False)
    ] = None,
    emulate: Annotated[
        str | None,
        typer.Option(help="Be slower: gflops=,down_mbit=,up_mbit=,rtt_ms=", show_default=False),
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option(help='Where the device\'s identity is kept; "none" for a throw-away one.', show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute tiles for a server, without a browser, until Ctrl-C."""
    from tileweave.volunteer.main import volunteer_main

    raise typer.Exit(volunteer_main(url, name, workers, emulate, identity, as_json))


@app.command()
def simulate(
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, one after another.")] = 1,
    as_json: Json = False,
) -> None:
    """Drive the real core with a fleet that comes, goes, lies and dies, on a virtual clock."""
    from backend.simulation.__main__ import main as run

    raise typer.Exit(run(["--seed", str(seed), "--seeds", str(seeds), *(["--json"] if as_json else [])]))


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the training.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Server, demo job and two local volunteers: the whole thing on this machine, in minutes."""
    from backend.demo import STEPS
    from backend.demo import demo as run

    raise typer.Exit(run(steps or STEPS, as_json))


@bench_app.command()
def parity(
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each run.", show_default=False)] = None,
    corrupt: Annotated[
        list[str] | None,
        typer.Option(
            help="Also with products spoiled after the check: skip1, bf16. Both by default.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Training on a browser against plain torch: how far the losses differ, and that spoiled products show."""
    from backend.bench import parity as bench
    from backend.bench.spoiled import KINDS

    kinds = corrupt or KINDS
    if unknown := set(kinds) - set(KINDS):
        _fail(f"got --corrupt {' '.join(sorted(unknown))}, expected {' or '.join(KINDS)}", 2)
    _bench(bench.parity(steps or bench.STEPS, kinds), as_json)


@bench_app.command()
def e2e(
    n: Annotated[int | None, typer.Option(min=1, help="Rows and columns.", show_default=False)] = None,
    runs: Annotated[
        int | None, typer.Option(min=1, help="Runs, of which the median counts.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """One square product through the whole system and a browser: GFLOP/s, against the kernel and tfjs alone."""
    from backend.bench import e2e as bench

    _bench(bench.e2e(n or bench.N, runs or bench.RUNS), as_json)


@bench_app.command()
def recovery(as_json: Json = False) -> None:
    """Kill, stop and cut off a device in the middle of a product: what each costs."""
    from backend.bench import recovery as bench

    _bench(bench.recovery(), as_json)


@bench_app.command()
def train(
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each run.", show_default=False)] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Only this recipe; may be given again.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Every recipe on a browser by both executors against plain torch; and what a slow round trip costs."""
    from backend.bench import train as bench

    if unknown := set(recipe or ()) - set(bench.CONFIGS):
        _fail(f"got --recipe {' '.join(sorted(unknown))}, expected of {', '.join(bench.CONFIGS)}", 2)
    _bench(bench.train(steps or bench.STEPS, tuple(recipe or bench.CONFIGS)), as_json)


@bench_app.command()
def kernels(as_json: Json = False) -> None:
    """Our WASM, WebGPU, Pyodide and native kernels beside tfjs, onnxruntime-web and jax-js, in one browser. Exit status
    0: measured, whatever the targets say."""
    from rich.console import Console

    from backend.bench import kernels as bench
    from backend.bench.kernels.table import show

    try:
        figures = bench.kernels()
    except (RuntimeError, FileNotFoundError) as error:
        _fail(str(error), 1)
    if as_json:
        print(json.dumps(figures))
    else:
        show(figures, Console())


def _check_tls(settings: Settings) -> None:
    """OSError where the certificate and its key cannot serve (ssl's errors are OSErrors). A gateway would only die of
    it, again and again."""
    import ssl

    if settings.tls_cert is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.tls_cert, settings.tls_key)


def _complaint(error: ErrorDetails) -> str:
    """One of pydantic's complaints in a line."""
    name = ".".join(str(part) for part in error["loc"])
    return f"{name}: got {error['input']!r}: {error['msg']}" if name else error["msg"]


def _bench(figures: dict[str, Any], as_json: bool) -> None:
    """Prints the figures; exit status 1 where a bench says that its limits do not hold."""
    _print(figures, as_json, json.dumps(figures, indent=2))
    raise typer.Exit(0 if figures.get("holds", True) else 1)


def _client(url: str, token: str | None) -> Client:
    """A client with the given token, else the one this machine's server keeps."""
    from backend.settings import Settings
    from tileweave.rest import Client

    if token is None:
        path = Settings().token_path
        token = path.read_text(encoding="ascii").strip() if path.is_file() else None
    return Client(url, token)


def _answer(call: Any) -> Any:
    from tileweave.rest import RestError

    try:
        return call()
    except RestError as error:
        _fail(str(error), 1)


def _line(job: dict[str, Any]) -> str:
    loss = "" if job["loss"] is None else f"  loss {job['loss']:.4f}"
    waiting = f"  ({job['waiting']})" if job["waiting"] else ""
    name = job["name"] or job["recipe"]
    return f"{job['id']}  {job['state']:<9}  {job['step'] or 0}/{job['steps']}{loss}  {name}{waiting}"


def _print(found: dict[str, Any], as_json: bool, text: str) -> None:
    print(json.dumps(found) if as_json else text)


def _fail(text: str, status: int) -> NoReturn:
    print(f"tileweave: {text}", file=sys.stderr)
    raise typer.Exit(status)


if __name__ == "__main__":
    main()
