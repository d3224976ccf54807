#include "octet/bench/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "octet/base/error.h"

namespace octet {

namespace {

constexpr const char* kNothing = "–";

std::string cell(const Column& column, const nlohmann::json& value) {
  if (value.is_null()) return kNothing;
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "WRONG";
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_integer()) return fmt::format("{}", value.get<std::int64_t>());
  return fmt::format("{:.{}f}", value.get<double>(), column.decimals);
}

/// Characters on the screen: bytes of UTF-8 that begin one.
std::size_t width(const std::string& text) {
  const auto begins = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; };
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), begins));
}

}  // namespace

void ResultTable::add(nlohmann::json row) {
  for (const auto& cell : row.items()) {
    const auto named = [&](const Column& column) { return column.key == cell.key(); };
    OCTET_ASSERT(std::any_of(columns_.begin(), columns_.end(), named));
    if (cell.value().is_number_float() && !std::isfinite(cell.value().get<double>())) cell.value() = nullptr;
  }
  for (const Column& column : columns_) {
    if (!row.contains(column.key)) row[column.key] = nullptr;
  }
  rows_.push_back(std::move(row));
}

bool ResultTable::correct() const {
  return std::none_of(rows_.begin(), rows_.end(), [](const nlohmann::json& row) {
    return row.contains("correct") && row["correct"].is_boolean() && !row["correct"].get<bool>();
  });
}

std::string ResultTable::text() const {
  std::vector<std::string> lines(rows_.size() + 1);
  for (const Column& column : columns_) {
    bool words = false, numbers = false;
    std::vector<std::string> cells{column.heading};
    for (const nlohmann::json& row : rows_) {
      words = words || row[column.key].is_string();
      numbers = numbers || row[column.key].is_number();
      cells.push_back(cell(column, row[column.key]));
    }
    std::size_t widest = 0;
    for (const std::string& text : cells) widest = std::max(widest, width(text));
    for (std::size_t i = 0; i < lines.size(); ++i) {
      const std::string blanks(widest - width(cells[i]), ' ');
      lines[i] += "  " + (words && !numbers ? cells[i] + blanks : blanks + cells[i]);
    }
  }
  std::string text;
  for (std::string& line : lines) text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  return text;
}

nlohmann::json ResultTable::json() const {
  nlohmann::json columns = nlohmann::json::object();
  for (const Column& column : columns_) columns[column.key] = column.heading;
  return {{"columns", std::move(columns)}, {"rows", rows_}};
}

}  // namespace octet
