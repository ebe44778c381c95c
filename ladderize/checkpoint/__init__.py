"""Reading a checkpoint, which comes from a stranger: nothing here writes, unpickles or leaves its folder. A leaf."""
