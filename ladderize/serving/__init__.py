"""Other people's engines, with ladderize's layers in them. Each engine is imported only inside its own folder here."""
