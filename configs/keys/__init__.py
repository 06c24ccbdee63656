"""Every key of a config, a row each: of these the config, its checks, help and docs are made."""
