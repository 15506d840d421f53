"""The machine and the versions that a measurement was made with."""

import os
import platform

import jax
import numpy as np
import optax
import optax_globalclip as ogc


def machine():
  with open("/proc/cpuinfo") as info:
    models = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
  return dict(cpu=models[0] if models else platform.processor(), cores=len(os.sched_getaffinity(0)),
              system=f"{platform.system()} {platform.machine()}", python=platform.python_version(),
              jax=jax.__version__, optax=optax.__version__, numpy=np.__version__, optax_globalclip=ogc.__version__,
              backend=ogc.backend_info()["cpu"].split(":")[0], load_average_at_start=round(os.getloadavg()[0], 1))
