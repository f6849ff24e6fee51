"""The parts of ``benchmarks.gpu``, each in a process of its own. Without CUDA they are rehearsed on the CPU."""
