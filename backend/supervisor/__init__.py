"""The process that starts, watches and ends all others: `tileweave serve`."""
