"""What a reader's query may use. Everything else is refused, also what a later engine adds.

Functions are allowed by the category that the engine itself gives them; from the categories that hold functions which
reach outside (`Other`, `Internal`) only those named here, which were read one by one."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


CATEGORIES = frozenset(
    {
        "Aggregate Functions",
        "Arithmetic",
        "Arrays",
        "Bit",
        "Bitmap",
        "Comparison",
        "Conditional",
        "Dates and Times",
        "Distance",
        "Encoding",
        "Financial",
        "Geo",
        "Hash",
        "IP Address",
        "JSON",
        "Logical",
        "Map",
        "Mathematical",
        "Null",
        "NumericIndexedVector",
        "QBit",
        "Random Number",
        "Rounding",
        "String",
        "String Replacement",
        "String Search",
        "String Splitting",
        "Time Window",
        "Tuple",
        "Type Conversion",
        "URL",
        "UUID",
    }
)
"""not: AI (they call services), Dictionary, Embedded Dictionary, Encryption, Geo Polygon (one value may take hours,
which ends the process), Internal, Introspection, Machine Learning, Other, Time Series (they keep state)"""

FORMATTERS = _words("formatrow formatrownonewline")
"""functions of those categories that are refused: they write formats that a query may not name, see FORMATS_OUTSIDE"""

FUNCTIONS = _words(
    (
        "lambda exists _CAST nested caseWithExpression validateNestedArraySizes bar blockNumber blockSize byteSize "
        "colorOKLABToSRGB colorOKLCHToSRGB colorSRGBToOKLAB colorSRGBToOKLCH countDigits currentDatabase currentRoles "
        "currentSchemas currentUser connectionId defaultRoles defaultValueOfArgumentType defaultValueOfTypeName digits "
        "displayName dumpColumnStructure enabledRoles errorCodeToName finalizeAggregation flipCoordinates grouping "
        "formatQuery formatQueryOrNull formatQuerySingleLine formatQuerySingleLineOrNull formatReadableDecimalSize "
        "formatReadableQuantity formatReadableSize formatReadableTimeDelta getSetting getSettingOrDefault "
        "getSizeOfEnumType getSubcolumn hostName identity ignore indexHint initializeAggregation initialQueryID "
        "isConstant isDecimalOverflow materialize minSampleSizeContinuous minSampleSizeConversion neighbor "
        "normalizedQueryHash normalizedQueryHashKeepNames normalizeQuery normalizeQueryKeepNames parseReadableSize "
        "parseReadableSizeOrNull parseReadableSizeOrZero parseTimeDelta parseISO8601Duration pgGetUserById "
        "pgTableIsVisible queryID currentQueryID revision rowNumberInAllBlocks rowNumberInBlock runningAccumulate "
        "runningDifference runningDifferenceStartingWithFirstValue serverTimezone shardCount shardNum throwIf "
        "toColumnTypeName toTypeName tokenizeQuery highlightQuery transform uptime variantElement variantType version "
        "visibleWidth lowCardinalityIndices lowCardinalityKeys globalVariable"
    ).lower()
)
"""functions of other categories that see nothing but the query and the tables that it may read"""

TABLE_FUNCTIONS = _words("numbers numbers_mt zeros zeros_mt primes generateseries generate_series view")
"""not those that take a structure (values, generateRandom, null, format): it holds defaults and aliases, which are
expressions of any function, in a text that may be put together where nobody sees it"""

DATABASES = frozenset({"millrace", "millrace_log", "default"})
"""whose tables and views may be read, all of them"""

CATALOGUES = frozenset({"information_schema", "INFORMATION_SCHEMA"})

SYSTEM = _words(
    "aggregate_function_combinators asynchronous_metrics build_options clusters collations columns constraints "
    "contributors current_roles data_skipping_indices data_type_families database_engines databases dictionaries "
    "documentation enabled_roles events formats functions keywords licenses macros merge_tree_settings merges "
    "metrics mutations numbers numbers_mt one parts parts_columns privileges projection_parts projections role_grants "
    "roles settings table_engines table_functions tables time_zones unicode zeros zeros_mt"
)
"""tables of `system` that say how the warehouse is made, and nothing of the machine or of others' queries (`errors`
quotes them)"""

STATEMENTS = _words(
    "SelectWithUnionQuery SelectIntersectExceptQuery SelectQuery Explain DescribeQuery ShowTables ShowColumns "
    "ShowIndexes ShowFunctions ShowEngineQuery ShowCreateTableQuery ShowCreateViewQuery ShowCreateDatabaseQuery "
    "ExistsTableQuery ExistsViewQuery ExistsDatabaseQuery"
)

OF_DATABASES = _words("ShowTables ShowCreateDatabaseQuery ExistsDatabaseQuery")
NAMING = OF_DATABASES | _words("ShowCreateTableQuery ShowCreateViewQuery ExistsTableQuery ExistsViewQuery")
"""statements that are about one database or table, which their tree names apart from any expression"""

INSIDE = STATEMENTS | {"TablesInSelectQuery"}
"""what the tree of one of them holds of the kind"""

EXPLAINS = frozenset(
    {"EXPLAIN", "EXPLAIN AST", "EXPLAIN SYNTAX", "EXPLAIN QUERY TREE", "EXPLAIN PIPELINE", "EXPLAIN ESTIMATE"}
)

FORMATS_OUTSIDE = _words(
    "template customseparated customseparatedwithnames customseparatedwithnamesandtypes protobuf protobufsingle "
    "protobuflist capnproto avroconfluent"
)
"""formats that read a schema or a template from a file, or ask a registry"""

SETTINGS = _words(
    "limit join_use_nulls extremes session_timezone date_time_input_format "
    "date_time_output_format cast_string_to_dynamic_use_inference group_by_use_nulls union_default_mode "
    "low_cardinality_allow_in_native_format result_overflow_mode bool_true_representation bool_false_representation "
    "format_csv_delimiter format_csv_null_representation format_tsv_null_representation output_format_write_statistics "
    "output_format_decimal_trailing_zeros output_format_float_precision output_format_enable_streaming"
)
SETTINGS_BEGIN = tuple(
    f"output_format_{name}_"
    for name in sorted(_words("json native arrow parquet csv tsv pretty binary values markdown avro orc"))
)
"""settings that shape an answer; limits may be lowered as well, see `limits`"""

WITHOUT_EFFECT = _words(
    "readonly log_queries log_comment buffer_size session_id session_timeout session_check quota_key stacktrace role "
    "wait_end_of_query send_progress_in_http_headers http_headers_progress_interval_ms "
    "enable_http_compression http_zlib_compression_level http_response_buffer_size add_http_cors_header "
    "cancel_http_readonly_queries_on_client_close http_native_compression_disable_checksumming_on_decompress "
    "http_write_exception_in_output_format output_format_parallel_formatting allow_experimental_analyzer "
    "max_query_size query_cache_ttl use_query_cache"
)
"""settings that stock clients send and that change nothing here"""
