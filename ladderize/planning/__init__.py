"""What a layout would gain on hardware that is not there, and which to choose. Imports workflows and what they do."""
