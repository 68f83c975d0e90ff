"""Everything that drafts, and the verifier it drafts for."""
