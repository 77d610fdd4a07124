// A kernel of elsewhere, found through `extra_include_dirs`.
#include "allreduce.cpp"
