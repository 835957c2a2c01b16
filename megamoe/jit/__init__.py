"""Run-time compilation: g++ for the host target, NVRTC or nvcc for sm_90a, into one cache that many processes share."""
