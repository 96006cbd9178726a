// Eigenvectors of small symmetric matrices, 64 / kSize of them at once in one warp.
#pragma once

#include "common.cuh"

namespace locks {

// Symmetric positive semidefinite G [kSize x kSize]: pivoted Cholesky G = L L^T, then one-sided
// Jacobi on the columns of L, rotating pairs of them until all are orthogonal.  Column j is then
// sqrt(lambda_j) u_j.  The columns of a pivoted L are graded and nearly orthogonal, so a fixed four
// or five sweeps do, where the columns of G itself need ten: and since the number is fixed, a
// matrix's result does not depend on the others in the warp.
//
// kSize / 2 neighbouring lanes share a matrix; a lane holds two of its rows, later two columns.
template <int kSize>
struct Jacobi {
  static constexpr int kLanes = kSize / 2;
  static constexpr int kSweeps = kSize == 16 ? 4 : 5;
  // Pivots below this share of the first are rounding errors: the rank ends there.
  static constexpr float kNoise = 2e-7f;
  // Below this squared cosine a rotation would only shuffle rounding errors.
  static constexpr float kOrthogonal = 1e-13f;

  float x[kSize], y[kSize];

  // Columns of L, from shared memory (`pitch` floats a row) once `factorise` has filled it.
  __device__ __forceinline__ void load(const float* factor, int pitch) {
    int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      x[i] = factor[i * pitch + lane];
      y[i] = factor[i * pitch + lane + kLanes];
    }
  }

  // `matrix(row, column)` reads G; L goes to `factor`, row by row.  Pivots up to `least` count as 0.
  template <typename Matrix>
  static __device__ __forceinline__ void factorise(const Matrix& matrix, float least, float* factor, int pitch) {
    int low = threadIdx.x % kLanes, high = low + kLanes;
    float* low_row = factor + low * pitch;
    float* high_row = factor + high * pitch;
    float low_rest = matrix(low, low), high_rest = matrix(high, high);  // diagonal of what is left
#pragma unroll 1
    for (int k = 0; k < kSize; ++k) {
      float pivot = fmaxf(low_rest, high_rest);
      int at = high_rest > low_rest ? high : low;
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) {
        float other = __shfl_xor_sync(kFullWarp, pivot, step);
        int other_at = __shfl_xor_sync(kFullWarp, at, step);
        if (other > pivot || (other == pivot && other_at < at)) pivot = other, at = other_at;
      }
      if (k == 0) least = fmaxf(least, kNoise * pivot);
      float inverse = pivot > least ? rsqrtf(pivot) : 0.f;
      float l = matrix(low, at), h = matrix(high, at);
      const float* pivot_row = factor + at * pitch;
#pragma unroll 4
      for (int j = 0; j < k; ++j) {
        l = fmaf(-low_row[j], pivot_row[j], l);
        h = fmaf(-high_row[j], pivot_row[j], h);
      }
      // Rows that were pivots have nothing left; theirs is marked by a negative rest.
      l = low_rest >= 0.f ? l * inverse : 0.f;
      h = high_rest >= 0.f ? h * inverse : 0.f;
      low_rest = at == low ? -1.f : low_rest < 0.f ? -1.f : fmaxf(fmaf(-l, l, low_rest), 0.f);
      high_rest = at == high ? -1.f : high_rest < 0.f ? -1.f : fmaxf(fmaf(-h, h, high_rest), 0.f);
      low_row[k] = l;
      high_row[k] = h;
      __syncwarp();
    }
  }

  // A sweep pairs every two columns once.  Only one column of a lane moves between rounds: first all
  // pairs of (x of any lane, y of any lane) by XOR of the lane number, then the x columns gather in
  // the lower and the y columns in the upper lanes and both halves repeat it among themselves.
  __device__ __forceinline__ void solve() {
#pragma unroll 1
    for (int sweep = 0; sweep < kSweeps; ++sweep) {
#pragma unroll 1
      for (int half = kLanes; half > 0; half /= 2) {
        if (half < kLanes) regroup(half);
#pragma unroll 1
        for (int round = 0; round < half; ++round) {
          if (round > 0) move(round ^ (round - 1));
          rotate();
        }
      }
    }
  }

  // Places of the lane's two columns in descending order of norm; ties by where they ended up.
  __device__ __forceinline__ void rank(float x_norm, float y_norm, int& x_rank, int& y_rank) const {
    int lane = threadIdx.x % kLanes;
    x_rank = y_rank = 0;
    for (int step = 0; step < kLanes; ++step) {
      float other_x = __shfl_xor_sync(kFullWarp, x_norm, step);
      float other_y = __shfl_xor_sync(kFullWarp, y_norm, step);
      int other = lane ^ step;
      x_rank += (other_x > x_norm || (other_x == x_norm && other < lane)) + (other_y > x_norm);
      y_rank += (other_y > y_norm || (other_y == y_norm && other < lane)) + (other_x >= y_norm);
    }
  }

 private:
  __device__ __forceinline__ void move(int mask) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) y[i] = __shfl_xor_sync(kFullWarp, y[i], mask);
  }

  __device__ __forceinline__ void regroup(int half) {
    bool upper = threadIdx.x & half;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      float got = __shfl_xor_sync(kFullWarp, upper ? x[i] : y[i], half);
      if (upper) x[i] = got;
      else y[i] = got;
    }
  }

  __device__ __forceinline__ void rotate() {
    float xx[2] = {}, yy[2] = {}, xy[2] = {};
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      xx[i % 2] = fmaf(x[i], x[i], xx[i % 2]);
      yy[i % 2] = fmaf(y[i], y[i], yy[i % 2]);
      xy[i % 2] = fmaf(x[i], y[i], xy[i % 2]);
    }
    float alpha = xx[0] + xx[1], beta = yy[0] + yy[1], gamma = xy[0] + xy[1];
    // tan of the angle that makes the two columns orthogonal; 0 where they are already.
    float zeta = __fdividef(beta - alpha, 2.f * gamma);
    float t = __fdividef(copysignf(1.f, zeta), fabsf(zeta) + sqrtf(fmaf(zeta, zeta, 1.f)));
    if (!(gamma * gamma > kOrthogonal * alpha * beta)) t = 0.f;
    float c = rsqrtf(fmaf(t, t, 1.f));
    float s = c * t;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      float old = x[i];
      x[i] = fmaf(c, old, -s * y[i]);
      y[i] = fmaf(c, y[i], s * old);
    }
  }
};

}  // namespace locks
