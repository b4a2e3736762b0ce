"""How a policy learns: losses and updates, torch and arithmetic only. No files, no environments, no network."""
