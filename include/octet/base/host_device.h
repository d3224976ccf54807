#pragma once

/// Marks functions that host and device code share.
#if defined(__CUDACC__)
#define OCTET_HOST_DEVICE __host__ __device__
#else
#define OCTET_HOST_DEVICE
#endif
