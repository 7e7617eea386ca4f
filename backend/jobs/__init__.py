"""The two processes of a running job: the coordinator and the script."""
