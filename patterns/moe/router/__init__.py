"""Routers: the choice of experts for each token, and the weights of the chosen ones."""
