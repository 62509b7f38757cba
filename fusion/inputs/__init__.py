"""Facts about inputs of a graph that the graph itself does not show: read, measured or assumed before fusing."""
