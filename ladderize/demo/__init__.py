"""The bundled tiny Llama and the sweep of ``ladderize demo``. Imports everything but cli."""
