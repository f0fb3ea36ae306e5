#define AVX_VNNI
#include "matmul_avx2.cpp"
