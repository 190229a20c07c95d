/* The parser of a build with toml++, which throws: so every entry point catches. */
#include "formats/toml.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include <toml++/toml.h>

namespace
{

static_assert(MTP__TOML_MAX_DEPTH == 32, "the message of prescan names the limit");

/* What mtp__toml points into. */
struct tree : mtp__toml {
    std::vector<mtp__toml_node> list;
    std::vector<std::unique_ptr<std::string>> strings;
    const char *keep(std::string_view text)
    {
        strings.push_back(std::make_unique<std::string>(text));
        return strings.back()->c_str();
    }
};

/* ---- before toml++ sees it ------------------------------------------------------------------------------------ */

/* toml++ recurses over tables, and builds one for every part of a dotted key: so the depth is limited here, counting
 * brackets, and dots in one key. Letters beyond ASCII outside of strings and comments, where TOML has none, are refused
 * here too (see ascii_twin). This follows the lexical structure of valid TOML only as far as needed; where the text is
 * invalid, toml++ stops at the first fault anyway. */
class prescan
{
  public:
    explicit prescan(std::string_view source) : text(source)
    {
    }

    /* What is wrong with the text, at `line`; NULL when nothing is. */
    const char *fault()
    {
        while (next < text.size()) {
            const char c = text[next];
            if (c == '"' || c == '\'')
                skip_string(c);
            else if (c == '#')
                next = std::min(text.find('\n', next), text.size());
            else if (static_cast<unsigned char>(c) >= 0x80)
                return "a letter beyond ASCII outside of quotes";
            else if (!take(c))
                return "nested deeper than 32 levels";
        }
        return nullptr;
    }

    int32_t line = 1;

  private:
    std::string_view text;
    size_t next = 0;
    int depth = 0, dots = 0;

    bool take(char c)
    {
        next++;
        if (c == '.') return ++dots < MTP__TOML_MAX_DEPTH;
        if (std::strchr("\n,=[]{}", c) != nullptr && c != '\0') dots = 0;
        if (c == '\n') line++;
        if (c == ']' || c == '}') depth = std::max(0, depth - 1);
        return (c != '[' && c != '{') || ++depth <= MTP__TOML_MAX_DEPTH;
    }

    bool at_triple(char quote) const
    {
        return text.size() - next >= 3 && text[next] == quote && text[next + 1] == quote && text[next + 2] == quote;
    }

    void skip_string(char quote)
    {
        const bool triple = at_triple(quote);
        next += triple ? 3 : 1;
        while (next < text.size() && (triple || text[next] != '\n')) {
            if (triple ? at_triple(quote) : text[next] == quote) {
                next += triple ? 3 : 1;
                /* a triple-quoted string may end with one or two quotes of its own */
                for (int i = 0; triple && i < 2 && next < text.size() && text[next] == quote; i++) next++;
                return;
            }
            if (quote == '"' && text[next] == '\\' && next + 1 < text.size()) next++;
            line += text[next] == '\n';
            next++;
        }
    }
};

bool has_non_ascii(std::string_view text)
{
    return std::any_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) >= 0x80; });
}

/* toml++ 3.3 asks of letters whether they are blanks in a way that is undefined for many of them. It asks so wherever
 * it looks for the end of a bare word, which in invalid text may be anywhere. So a text with such letters is parsed
 * with two ASCII letters for each of their bytes first: when that succeeds, they are all inside strings and comments,
 * where it does not ask. The first letter of a pair is I..P, which makes no escape sequence behind a backslash. */
std::string ascii_twin(std::string_view text)
{
    std::string twin;
    twin.reserve(2 * text.size());
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte < 0x80) {
            twin += c;
        } else {
            twin += static_cast<char>('A' + (byte >> 4));
            twin += static_cast<char>('a' + (byte & 15));
        }
    }
    return twin;
}

/* ---- toml++ to nodes ------------------------------------------------------------------------------------------ */

mtp_status fail_memory(const char *origin)
{
    return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", origin);
}

/* "file:line", or what the user typed behind --set. */
std::string place(const tree &to, int32_t line)
{
    return to.is_override ? std::string(to.origin) : std::string(to.origin) + ":" + std::to_string(line);
}

class converter
{
  public:
    explicit converter(tree &target) : to(target)
    {
    }

    mtp_status add(const toml::node &node, int32_t parent, const char *key, int32_t line)
    {
        const auto index = static_cast<int32_t>(to.list.size());
        mtp__toml_node entry = {};
        entry.line = line;
        entry.parent = parent;
        entry.first_child = entry.next_sibling = -1;
        entry.key = key;
        MTP_TRY(fill(entry, node));
        to.list.push_back(entry);
        if (const toml::table *table = node.as_table()) return add_members(*table, index);
        if (const toml::array *array = node.as_array()) return add_items(*array, index);
        return MTP_OK;
    }

  private:
    tree &to;

    mtp_status fill(mtp__toml_node &entry, const toml::node &node)
    {
        switch (node.type()) {
        case toml::node_type::table:
            entry.kind = MTP__TOML_TABLE;
            return MTP_OK;
        case toml::node_type::array:
            entry.kind = MTP__TOML_ARRAY;
            return MTP_OK;
        case toml::node_type::string:
            return fill_string(entry, node.as_string()->get());
        case toml::node_type::integer:
            entry.kind = MTP__TOML_INTEGER;
            entry.integer = node.as_integer()->get();
            entry.number = static_cast<double>(entry.integer);
            return MTP_OK;
        case toml::node_type::floating_point:
            entry.kind = MTP__TOML_FLOAT;
            entry.number = node.as_floating_point()->get();
            return MTP_OK;
        case toml::node_type::boolean:
            entry.kind = MTP__TOML_BOOL;
            entry.boolean = node.as_boolean()->get();
            return MTP_OK;
        default:
            return MTP_FAIL(MTP_E_CONFIG, "%s: dates and times are not used here", place(to, entry.line).c_str());
        }
    }

    mtp_status fill_string(mtp__toml_node &entry, const std::string &value)
    {
        if (value.find('\0') != std::string::npos)
            return MTP_FAIL(MTP_E_CONFIG, "%s: a string with a NUL character", place(to, entry.line).c_str());
        entry.kind = MTP__TOML_STRING;
        entry.string = to.keep(value);
        return MTP_OK;
    }

    /* Puts the node that comes next behind the last child of `parent`. */
    void link(int32_t parent, int32_t &last)
    {
        const auto index = static_cast<int32_t>(to.list.size());
        if (last < 0)
            to.list[static_cast<size_t>(parent)].first_child = index;
        else
            to.list[static_cast<size_t>(last)].next_sibling = index;
        to.list[static_cast<size_t>(parent)].num_children++;
        last = index;
    }

    mtp_status add_members(const toml::table &table, int32_t parent)
    {
        std::vector<std::pair<const toml::key *, const toml::node *>> members;
        for (auto &&[key, value] : table) members.emplace_back(&key, &value);
        std::stable_sort(members.begin(), members.end(), [](const auto &a, const auto &b) {
            const toml::source_position x = a.first->source().begin, y = b.first->source().begin;
            return x.line != y.line ? x.line < y.line : x.column < y.column;
        });
        int32_t last = -1;
        for (const auto &[key, value] : members) {
            if (key->str().find('\0') != std::string_view::npos)
                return MTP_FAIL(MTP_E_CONFIG, "%s: a key with a NUL character",
                                place(to, static_cast<int32_t>(key->source().begin.line)).c_str());
            link(parent, last);
            MTP_TRY(add(*value, parent, to.keep(key->str()), static_cast<int32_t>(key->source().begin.line)));
        }
        return MTP_OK;
    }

    mtp_status add_items(const toml::array &array, int32_t parent)
    {
        int32_t last = -1;
        for (const toml::node &item : array) {
            link(parent, last);
            MTP_TRY(add(item, parent, nullptr, static_cast<int32_t>(item.source().begin.line)));
        }
        return MTP_OK;
    }
};

mtp_status fill_tree(tree &to, std::string_view text)
{
    if (text.substr(0, 3) == "\xef\xbb\xbf") text.remove_prefix(3); /* a byte order mark */
    if (text.size() > MTP__TOML_MAX_BYTES)
        return MTP_FAIL(MTP_E_CONFIG, "%s: has %zu bytes; at most %d are read", to.origin, text.size(),
                        MTP__TOML_MAX_BYTES);
    prescan scan(text);
    if (const char *fault = scan.fault()) return MTP_FAIL(MTP_E_CONFIG, "%s: %s", place(to, scan.line).c_str(), fault);
    try {
        if (has_non_ascii(text)) (void)toml::parse(ascii_twin(text));
        const toml::table root = toml::parse(text);
        MTP_TRY(converter(to).add(root, -1, nullptr, 1));
    } catch (const toml::parse_error &error) {
        const toml::source_position at = error.source().begin;
        const std::string column = to.is_override ? "" : ":" + std::to_string(at.column);
        return MTP_FAIL(MTP_E_CONFIG, "%s%s: not valid TOML: %.*s", place(to, static_cast<int32_t>(at.line)).c_str(),
                        column.c_str(), static_cast<int>(error.description().size()), error.description().data());
    }
    to.nodes = to.list.data();
    to.num_nodes = static_cast<int32_t>(to.list.size());
    return MTP_OK;
}

mtp_status parse_text(std::string_view text, const char *origin, bool is_override, mtp__toml **toml)
{
    *toml = nullptr;
    try {
        auto built = std::make_unique<tree>();
        built->is_override = is_override;
        built->origin = built->keep(origin);
        MTP_TRY(fill_tree(*built, text));
        *toml = built.release();
        return MTP_OK;
    } catch (const std::bad_alloc &) {
        return fail_memory(origin);
    } catch (const std::exception &error) {
        return MTP_FAIL(MTP_E_BACKEND, "%s: toml++ failed: %s", origin, error.what());
    }
}

} // namespace

mtp_status mtp__toml_parse_as(const char *text, size_t size, const char *origin, bool is_override, mtp__toml **toml)
{
    return parse_text(std::string_view(text, size), origin, is_override, toml);
}

void mtp__toml_free(mtp__toml *toml)
{
    delete static_cast<tree *>(toml);
}
