// Rows of queries and keys: where they lie in the tensors, and their way into tiles and back. Included once per tier,
// after columns-inl.h.

// First element of token `token` in one head of keys or values.
template <class Elem>
PACKFREE_INLINE const Elem* KeyRow(const HeadRows& rows, int64_t token, int64_t head) {
  return static_cast<const Elem*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
}

// First element of row m of the queries of a key head in `rows`; `bos` is the sequence's first token.
template <class Elem>
PACKFREE_INLINE const Elem* TileRow(const HeadRows& rows, int64_t bos, int64_t group, int64_t kv_head, int64_t m) {
  return static_cast<const Elem*>(rows.data) + (bos + m / group) * rows.token_stride +
         (kv_head * group + m % group) * rows.head_stride;
}

// target[c] = TileRow of each column of a tile; walks through heads and tokens, for divisions are slow.
template <class Elem, class Acc>
PACKFREE_INLINE void TileRows(const QueryTile<Acc>& tile, const HeadRows& rows, int64_t bos, int64_t group,
                              int64_t kv_head, const Elem** target) {
  int64_t head = tile.first % group;
  const Elem* token = TileRow<Elem>(rows, bos, group, kv_head, tile.first - head);
  for (int64_t c = 0; c < tile.columns; ++c) {
    target[c] = token + head * rows.head_stride;
    if (++head == group) {
      head = 0;
      token += rows.token_stride;
    }
  }
}

// tile[c, 0:dim] = the row of `rows` behind each column, widened.
template <class Elem, class Acc>
inline void LoadQueryRows(const QueryTile<Acc>& tile, const HeadRows& rows, int64_t bos, int64_t group, int64_t kv_head,
                          int64_t dim, Acc* target, int64_t ld) {
  const Elem* source[kTileColumns];
  TileRows(tile, rows, bos, group, kv_head, source);
  for (int64_t c = 0; c < tile.columns; ++c) LoadTile(1, dim, source[c], 0, target + c * ld, ld);
}

// Rows of `target` [tokens, H, dim] behind each column = scale * source[:, c], where source [dim, kTileColumns] is held
// transposed. `rows` is scratch [kTileColumns, PaddedDim(dim)].
template <class Elem, class Acc>
inline void StoreQueryColumns(const QueryTile<Acc>& tile, const Acc* source, Acc scale, int64_t bos, int64_t group,
                              int64_t kv_head, int64_t heads, int64_t dim, Elem* target, Acc* rows) {
  const int64_t ld = PaddedDim(dim);
  LoadTileTransposed(dim, tile.columns, source, kTileColumns, rows, ld, scale);
  const Elem* to[kTileColumns];
  TileRows(tile, HeadRows{target, heads * dim, dim}, bos, group, kv_head, to);
  for (int64_t c = 0; c < tile.columns; ++c) StoreTile(1, dim, rows + c * ld, ld, const_cast<Elem*>(to[c]), 0);
}

// The rows of `source` behind each column of a tile, as they are and transposed (times `sign`).
template <class Elem, class Acc>
inline void LoadQueryTile(const QueryTile<Acc>& tile, const HeadRows& source, int64_t bos, int64_t group,
                          int64_t kv_head, int64_t dim, Acc sign, Acc* rows, Acc* transposed) {
  LoadQueryRows<Elem>(tile, source, bos, group, kv_head, dim, rows, PaddedDim(dim));
  LoadTileTransposed(tile.columns, dim, rows, PaddedDim(dim), transposed, kTileColumns, sign);
}
