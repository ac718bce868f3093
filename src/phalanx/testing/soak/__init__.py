"""Roles under load: streams of requests, while engines die, drain, scale, sleep and get new weights."""
