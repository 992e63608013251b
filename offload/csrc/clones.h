#pragma once

#include <cstddef>  // also tells __GLIBC__, whose loader resolves clones

// One function, compiled for several instruction sets and chosen at load time, so that one build
// serves every x86-64 machine. Sanitizers cannot run in the resolver, so they get one version.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define TIERZERO_CLONES [[gnu::target_clones("default", "avx2", "avx512f")]]
#else
#define TIERZERO_CLONES
#endif
