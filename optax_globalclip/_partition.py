"""Meshes: what happens to a norm and a clip when leaves live on several devices."""

from optax_globalclip import _platform

norm = _platform.norm
clip = _platform.clip
