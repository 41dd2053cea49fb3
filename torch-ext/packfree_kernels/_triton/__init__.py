"""What the Triton kernels share. Imported with the first CUDA tensor, never with the package: torch may lack Triton."""
