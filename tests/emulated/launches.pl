# launches.pl FILE: a .cu file, or a .cuh file with kernels, rewritten into plain C++ for cuda_emulation.h:
# kernel<T><<<grid, block, shared, stream>>>(…) becomes a call of emulation::Launch, dynamic shared memory a
# pointer, and the blocks of a cluster those of all launches that follow.
undef $/;
$_ = <>;
print "#undef OCTET_EMULATED_CLUSTER\n#define OCTET_EMULATED_CLUSTER $1\n" if /__cluster_dims__\((\d+), 1, 1\)/;
print "#line 1 \"$ARGV\"\n";
s/((?:\w+::)*(?:\w+_)?kernel(?:<[^;{}]*?>)?)\s*<<<(.*?)>>>\s*\(/emulation::Launch(OCTET_EMULATED_CLUSTER, $2).with([=](auto... a) { $1(a...); })(/gs;
s/extern __shared__ ([\w ]+) (\w+)\[\];/$1* const $2 = static_cast<$1*>(emulation::dynamic_shared());/g;
print;
