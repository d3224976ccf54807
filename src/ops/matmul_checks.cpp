#include "matmul_checks.h"

#include "float8_checks.h"
#include "octet/base/error.h"

namespace octet {

void check_matmul(const Matmul& args) {
  const std::int64_t m = args.transpose_a ? args.a.cols : args.a.rows;
  const std::int64_t k = args.transpose_a ? args.a.rows : args.a.cols;
  const std::int64_t n = args.transpose_b ? args.b.rows : args.b.cols;
  OCTET_ASSERT((args.transpose_b ? args.b.cols : args.b.rows) == k && args.y.rows == m);
  OCTET_ASSERT(n == (args.epilogue == Epilogue::kSwiglu ? 2 * args.y.cols : args.y.cols));
  OCTET_ASSERT(!args.bias || args.bias.size() == n);
  OCTET_ASSERT(!args.addend || (args.addend.rows == m && args.addend.cols == n && !args.accumulate &&
                                args.addend.dtype == args.y.dtype && args.epilogue == Epilogue::kNone));
  OCTET_ASSERT(!args.bias_gradient ||
               (args.epilogue == Epilogue::kGeluGradient && args.bias_gradient.dtype == DType::kF32 &&
                args.bias_gradient.size() == n));
  if (is_float8(args.a.dtype)) {
    check_float8(args);
    OCTET_ASSERT(args.epilogue == Epilogue::kNone);
    return;
  }
  const DType compute = args.a.dtype;
  OCTET_ASSERT(compute == args.b.dtype && (args.y.dtype == compute || args.y.dtype == DType::kF32));
  OCTET_ASSERT(!args.bias || args.bias.dtype == compute);
  if (args.epilogue != Epilogue::kNone) {
    const bool forward = args.epilogue == Epilogue::kGelu || args.epilogue == Epilogue::kSwiglu;
    OCTET_ASSERT(!args.transpose_a && args.transpose_b == forward);
    OCTET_ASSERT(args.y.dtype == compute && !args.accumulate);
    OCTET_ASSERT(args.inner.rows == m && args.inner.cols == (is_gated(args.epilogue) ? 2 : 1) * args.y.cols);
    OCTET_ASSERT(args.inner.dtype == compute);
    OCTET_ASSERT(args.inner.data != args.y.data);
    OCTET_ASSERT(forward || !args.bias);
  }
}

}  // namespace octet
