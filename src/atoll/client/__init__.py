"""`atoll.connect`: the engine of another machine, through its server."""
