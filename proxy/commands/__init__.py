"""The sub-commands of `recap`, one module each; `proxy.cli` says what such a module has."""
