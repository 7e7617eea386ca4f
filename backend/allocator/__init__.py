"""Which job each device serves: a sans-I/O core, run by `serve`."""
