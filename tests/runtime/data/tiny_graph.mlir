// Entry points without caches, one per thing the runtime must carry through: names, types, scalars, failures.
func.func @affine(%x: tensor<?x3xf32>, %y: tensor<?x3xf32>) -> (tensor<?x3xf32>, tensor<?x3xf32>) {
  %sum = arith.addf %x, %y : tensor<?x3xf32>
  %product = arith.mulf %x, %y : tensor<?x3xf32>
  return %sum, %product : tensor<?x3xf32>, tensor<?x3xf32>
}

func.func @types(%b: tensor<2x3xbf16>, %e: tensor<4xf8E4M3FN>, %h: tensor<2xf16>, %p: tensor<3xi1>, %i: tensor<i32>)
    -> (tensor<2x3xbf16>, tensor<4xf8E4M3FN>, tensor<2xf16>, tensor<3xi1>, tensor<i32>) {
  return %b, %e, %h, %p, %i : tensor<2x3xbf16>, tensor<4xf8E4M3FN>, tensor<2xf16>, tensor<3xi1>, tensor<i32>
}

func.func @scalar(%n: i64, %x: f32) -> i64 {
  %one = arith.constant 1 : i64
  %m = arith.addi %n, %one : i64
  return %m : i64
}

func.func @refuse(%x: tensor<2xi32>) -> tensor<2xi32> {
  %c0 = arith.constant 0 : index
  %zero = arith.constant 0 : i32
  %first = tensor.extract %x[%c0] : tensor<2xi32>
  %fine = arith.cmpi sge, %first, %zero : i32
  cf.assert %fine, "first element below zero"
  return %x : tensor<2xi32>
}
