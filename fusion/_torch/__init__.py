"""The private interfaces of torch that the project needs, except Inductor's; checked against torch 2.13.0."""
