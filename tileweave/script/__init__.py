"""What a training script uses: attach to a job, offload GEMMs, write checkpoints. Needs torch; `protocol` does not."""
