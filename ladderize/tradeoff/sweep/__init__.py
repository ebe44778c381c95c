"""Many layouts from conversion to speed: a stage is a command, kept by a hash of what it depends on."""
