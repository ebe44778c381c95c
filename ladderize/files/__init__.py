"""Files that users name, and files that must appear whole or go on after a kill. A leaf."""
