// Checks of an operator's arguments. Each message names the argument, the expected value and the value got.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>

namespace {

using at::Tensor;

// Check the dtype of rows: the kernels have a float32 and a bfloat16 version.
inline void check_row_dtype(const char* name, const Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16, name,
              " must have dtype Float or BFloat16, got ", tensor.scalar_type());
}

inline void check_dtype(const char* name, const Tensor& tensor, at::ScalarType expected) {
  TORCH_CHECK(tensor.scalar_type() == expected, name, " must have dtype ", expected, ", got ",
              tensor.scalar_type());
}

inline void check_shape(const char* name, const Tensor& tensor, at::IntArrayRef expected) {
  TORCH_CHECK(tensor.sizes() == expected, name, " must have shape ", expected, ", got ", tensor.sizes());
}

inline void check_contiguous(const char* name, const Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous, got shape ", tensor.sizes(),
              " with strides ", tensor.strides());
}

// Check an operand that may have any strides.
inline void check_strided(const char* name, const Tensor& tensor, at::ScalarType dtype,
                          at::IntArrayRef shape) {
  check_dtype(name, tensor, dtype);
  check_shape(name, tensor, shape);
}

// Check an operand that is read as one array.
inline void check(const char* name, const Tensor& tensor, at::ScalarType dtype, at::IntArrayRef shape) {
  check_strided(name, tensor, dtype, shape);
  check_contiguous(name, tensor);
}

// Check the number of dimensions before their sizes are read. `dimensions` names them, as in "[row, width]".
inline void check_dim(const char* name, const Tensor& tensor, int64_t expected, const char* dimensions) {
  TORCH_CHECK(tensor.dim() == expected, name, " must have ", expected, " dimensions ", dimensions,
              ", got shape ", tensor.sizes());
}

// Check that vectors can be loaded from the last dimension. The others may have any stride.
inline void check_last_stride(const char* name, const Tensor& tensor) {
  TORCH_CHECK(tensor.stride(-1) == 1, name, " must have a last stride of 1, got strides ", tensor.strides());
}

inline void check_even_width(const char* name, const Tensor& tensor) {
  TORCH_CHECK(tensor.size(-1) % 2 == 0, name, " must have an even width, got ", tensor.size(-1));
}

// Check that each KV head serves the same number of query heads.
inline void check_groups(int64_t num_heads, int64_t num_kv_heads) {
  TORCH_CHECK(num_kv_heads > 0 && num_heads % num_kv_heads == 0, "query must have a multiple of ",
              num_kv_heads, " heads, the number of KV heads, got ", num_heads);
}

// Return the data of an optional argument, or null for None.
template <typename T>
const T* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

}  // namespace
