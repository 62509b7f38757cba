"""Facts about the inputs of a graph that the graph itself does not have: read, measured or assumed before fusing."""
