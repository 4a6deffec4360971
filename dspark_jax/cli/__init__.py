"""Commands: one module each; `main` puts them together."""
