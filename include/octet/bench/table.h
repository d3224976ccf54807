#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace octet {

/// A column of a table of results: its key in JSON, and its heading with the unit.
struct Column {
  std::string key, heading;
  int decimals = 1;  ///< of numbers that are no integers
};

/// Rows of results as people and programs read them. A column that a row lacks prints as "–" and is null in
/// JSON; numbers that are not finite become null too, since JSON has none.
class ResultTable {
 public:
  explicit ResultTable(std::vector<Column> columns) : columns_(std::move(columns)) {}

  /// An object by column key. Whether a result is right stands under "correct".
  void add(nlohmann::json row);
  const std::vector<nlohmann::json>& rows() const { return rows_; }
  /// Whether no row has "correct": false.
  bool correct() const;

  /// A heading and a line a row, numbers to the right; `correct` prints as yes or WRONG.
  std::string text() const;
  /// {"columns": {key: heading}, "rows": [{key: value}]}
  nlohmann::json json() const;

 private:
  std::vector<Column> columns_;
  std::vector<nlohmann::json> rows_;
};

}  // namespace octet
