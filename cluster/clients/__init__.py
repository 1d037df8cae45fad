"""The commands that ask a server over HTTP."""
