"""The private APIs of torch that the project needs, but for Inductor's; all of them checked against torch 2.13.0."""
