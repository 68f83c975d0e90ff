"""Conversations to samples: reading chat files, rendering, supervised masks, answers, batches, draft vocabulary."""
