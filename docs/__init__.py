"""Pages of the documentation, and the code that generates some of them."""
