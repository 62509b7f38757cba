"""The attack: programs composed of our vocabulary and changed slightly, whose fused results must be the plain ones."""
