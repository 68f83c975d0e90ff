"""How several processes train one head, a file a strategy."""
