"""Reading and writing of checkpoints. They come from strangers: nothing is unpickled or read outside their folder. A
leaf."""
