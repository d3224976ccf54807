#pragma once

#include <bit>
#include <cstdint>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace octet::test {

/// A named matrix of a reference file. float32 and int32 elements are held exactly.
struct ReferenceMatrix {
  std::int64_t rows = 0, cols = 0;
  std::vector<double> values;

  std::vector<float> floats() const { return {values.begin(), values.end()}; }
  std::vector<std::int32_t> integers() const { return {values.begin(), values.end()}; }
};

/// Values recorded from PyTorch by the scripts in tests/reference; reference_file.py describes the layout.
class ReferenceFile {
 public:
  /// `name`: a file in tests/reference, such as "ops.ref".
  explicit ReferenceFile(const std::string& name) : name_(name) {
    static_assert(std::endian::native == std::endian::little);
    std::ifstream file(std::string(OCTET_REFERENCE_DIR) + "/" + name, std::ios::binary);
    std::string line;
    if (!std::getline(file, line) || line != "octet-reference 1") {
      throw std::runtime_error("no reference file " + std::string(OCTET_REFERENCE_DIR) + "/" + name);
    }
    while (std::getline(file, line)) read_entry(file, line);
  }

  const ReferenceMatrix& operator[](const std::string& entry) const {
    const auto found = entries_.find(entry);
    if (found == entries_.end()) throw std::runtime_error(name_ + " has no entry " + entry);
    return found->second;
  }
  bool contains(const std::string& entry) const { return entries_.contains(entry); }
  /// Names that begin with `prefix`, in order.
  std::vector<std::string> names(const std::string& prefix) const {
    std::vector<std::string> result;
    for (const auto& [name, matrix] : entries_) {
      if (name.starts_with(prefix)) result.push_back(name);
    }
    return result;
  }

 private:
  template <typename T>
  static void read_values(std::ifstream& file, ReferenceMatrix& matrix) {
    std::vector<T> values(static_cast<std::size_t>(matrix.rows * matrix.cols));
    file.read(reinterpret_cast<char*>(values.data()),
              static_cast<std::streamsize>(values.size() * sizeof(T)));
    matrix.values.assign(values.begin(), values.end());
  }

  void read_entry(std::ifstream& file, const std::string& line) {
    std::istringstream header(line);
    std::string entry, dtype;
    ReferenceMatrix matrix;
    header >> entry >> dtype >> matrix.rows >> matrix.cols;
    if (dtype == "float32") read_values<float>(file, matrix);
    if (dtype == "float64") read_values<double>(file, matrix);
    if (dtype == "int32") read_values<std::int32_t>(file, matrix);
    if (!file || matrix.values.empty()) throw std::runtime_error(name_ + ": entry " + entry + " is damaged");
    entries_[entry] = std::move(matrix);
  }

  std::string name_;
  std::map<std::string, ReferenceMatrix> entries_;
};

}  // namespace octet::test
