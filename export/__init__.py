"""Draft heads in the layouts that serving engines load, checked against their loaders, and read back."""
