"""Files that users name, and files that appear whole or survive a kill. A leaf."""
