# launches.pl FILE.cu: the file with its kernel launches and dynamic shared memory rewritten into plain C++ for
# cuda_emulation.h; kernel<T><<<grid, block, shared, stream>>>(…) becomes a call of emulation::Launch.
undef $/;
$_ = <>;
print "#line 1 \"$ARGV\"\n";
s/((?:\w+::)*\w+_kernel(?:<[^;{}]*?>)?)\s*<<<(.*?)>>>\s*\(/emulation::Launch($2).with([](auto... a) { $1(a...); })(/gs;
s/extern __shared__ (\w+) (\w+)\[\];/$1* const $2 = static_cast<$1*>(emulation::dynamic_shared());/g;
print;
