// A decoder small enough to compute by hand: 11 tokens, width 4, 16 positions.
//   k0[p] = embedding[token p], v0[p] = k0[p] * k0[p]
//   logits of position p = (sum of k0[0..p] + 3 * sum of v0[0..p]) . head
// prefill and decode update the caches in place: they write into arguments and read the result.
util.global private @embedding = #flow.parameter.named<"model"::"embedding"> : tensor<11x4xf32>
util.global private @head = #flow.parameter.named<"model"::"head"> : tensor<4x11xf32>

util.func private @embed(%tokens: tensor<?xi64>) -> tensor<?x4xf32> {
  %c0 = arith.constant 0 : index
  %table = util.global.load @embedding : tensor<11x4xf32>
  %t = tensor.dim %tokens, %c0 : tensor<?xi64>
  %empty = tensor.empty(%t) : tensor<?x4xf32>
  %rows = linalg.generic {
    indexing_maps = [affine_map<(t, d) -> (t)>, affine_map<(t, d) -> (t, d)>],
    iterator_types = ["parallel", "parallel"]
  } ins(%tokens : tensor<?xi64>) outs(%empty : tensor<?x4xf32>) {
  ^bb0(%token: i64, %out: f32):
    %row = arith.index_cast %token : i64 to index
    %column = linalg.index 1 : index
    %value = tensor.extract %table[%row, %column] : tensor<11x4xf32>
    linalg.yield %value : f32
  } -> tensor<?x4xf32>
  util.return %rows : tensor<?x4xf32>
}

// state[t] = sum over p < first + t + 1 of (k[p] + 3 v[p]); logits = state . head
util.func private @logits(%k: tensor<?x4xf32>, %v: tensor<?x4xf32>, %first: index, %count: index) -> tensor<?x11xf32> {
  %zero = arith.constant 0.0 : f32
  %three = arith.constant 3.0 : f32
  %head = util.global.load @head : tensor<4x11xf32>
  %e0 = tensor.empty(%count) : tensor<?x4xf32>
  %z0 = linalg.fill ins(%zero : f32) outs(%e0 : tensor<?x4xf32>) -> tensor<?x4xf32>
  %state = linalg.generic {
    indexing_maps = [affine_map<(t, d, p) -> (p, d)>, affine_map<(t, d, p) -> (p, d)>, affine_map<(t, d, p) -> (t, d)>],
    iterator_types = ["parallel", "parallel", "reduction"]
  } ins(%k, %v : tensor<?x4xf32>, tensor<?x4xf32>) outs(%z0 : tensor<?x4xf32>) {
  ^bb0(%kp: f32, %vp: f32, %sum: f32):
    %t = linalg.index 0 : index
    %p = linalg.index 2 : index
    %last = arith.addi %first, %t : index
    %visible = arith.cmpi ule, %p, %last : index
    %v3 = arith.mulf %vp, %three : f32
    %kv = arith.addf %kp, %v3 : f32
    %next = arith.addf %sum, %kv : f32
    %kept = arith.select %visible, %next, %sum : f32
    linalg.yield %kept : f32
  } -> tensor<?x4xf32>
  %e1 = tensor.empty(%count) : tensor<?x11xf32>
  %z1 = linalg.fill ins(%zero : f32) outs(%e1 : tensor<?x11xf32>) -> tensor<?x11xf32>
  %result = linalg.matmul ins(%state, %head : tensor<?x4xf32>, tensor<4x11xf32>) outs(%z1 : tensor<?x11xf32>) -> tensor<?x11xf32>
  util.return %result : tensor<?x11xf32>
}

util.func private @step(%tokens: tensor<?xi64>, %position: tensor<1xi64>, %k0: tensor<16x4xf32>, %v0: tensor<16x4xf32>) -> tensor<11xf32> {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %t = tensor.dim %tokens, %c0 : tensor<?xi64>
  %rows = util.call @embed(%tokens) : (tensor<?xi64>) -> tensor<?x4xf32>
  %squares = arith.mulf %rows, %rows : tensor<?x4xf32>
  %p64 = tensor.extract %position[%c0] : tensor<1xi64>
  %p = arith.index_cast %p64 : i64 to index
  %k = tensor.insert_slice %rows into %k0[%p, 0] [%t, 4] [1, 1] : tensor<?x4xf32> into tensor<16x4xf32>
  %v = tensor.insert_slice %squares into %v0[%p, 0] [%t, 4] [1, 1] : tensor<?x4xf32> into tensor<16x4xf32>
  %kd = tensor.cast %k : tensor<16x4xf32> to tensor<?x4xf32>
  %vd = tensor.cast %v : tensor<16x4xf32> to tensor<?x4xf32>
  %end = arith.addi %p, %t : index
  %last = arith.subi %end, %c1 : index
  %l = util.call @logits(%kd, %vd, %last, %c1) : (tensor<?x4xf32>, tensor<?x4xf32>, index, index) -> tensor<?x11xf32>
  %row = tensor.extract_slice %l[0, 0] [1, 11] [1, 1] : tensor<?x11xf32> to tensor<11xf32>
  util.return %row : tensor<11xf32>
}

func.func @prefill(%tokens: tensor<?xi64>, %position: tensor<1xi64>, %k0: tensor<16x4xf32>, %v0: tensor<16x4xf32>) -> tensor<11xf32> {
  %l = util.call @step(%tokens, %position, %k0, %v0) : (tensor<?xi64>, tensor<1xi64>, tensor<16x4xf32>, tensor<16x4xf32>) -> tensor<11xf32>
  return %l : tensor<11xf32>
}

func.func @decode(%token: tensor<1xi64>, %position: tensor<1xi64>, %k0: tensor<16x4xf32>, %v0: tensor<16x4xf32>) -> tensor<11xf32> {
  %tokens = tensor.cast %token : tensor<1xi64> to tensor<?xi64>
  %l = util.call @step(%tokens, %position, %k0, %v0) : (tensor<?xi64>, tensor<1xi64>, tensor<16x4xf32>, tensor<16x4xf32>) -> tensor<11xf32>
  return %l : tensor<11xf32>
}

func.func @forward(%tokens: tensor<?xi64>) -> tensor<?x11xf32> {
  %c0 = arith.constant 0 : index
  %t = tensor.dim %tokens, %c0 : tensor<?xi64>
  %rows = util.call @embed(%tokens) : (tensor<?xi64>) -> tensor<?x4xf32>
  %squares = arith.mulf %rows, %rows : tensor<?x4xf32>
  %l = util.call @logits(%rows, %squares, %c0, %t) : (tensor<?x4xf32>, tensor<?x4xf32>, index, index) -> tensor<?x11xf32>
  return %l : tensor<?x11xf32>
}
