"""Steps of several deployments side by side."""
