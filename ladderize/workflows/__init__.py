"""What joins convert, runtime, eval and adapt: spd, merge, sensitivity. No commands of other rooms are here."""
