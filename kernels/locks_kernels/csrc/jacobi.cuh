// Eigenvectors of small symmetric matrices, 64 / kSize of them at once in one warp.
#pragma once

#include "common.cuh"

namespace locks {

// One-sided Jacobi on a symmetric positive semidefinite matrix G [kSize x kSize]: rotating pairs
// of its columns until all are orthogonal turns column j into lambda_j u_j.
//
// A lane holds two columns, kSize / 2 neighbouring lanes hold a matrix.  The rounds of a sweep
// pair every two columns once.  Only one column of a lane moves between rounds: first all pairs
// of (x of any lane, y of any lane) by XOR of the lane number, then the x columns gather in the
// lower and the y columns in the upper lanes and both halves repeat the scheme among themselves.
template <int kSize>
struct Jacobi {
  static constexpr int kLanes = kSize / 2;
  static constexpr int kMatrices = 32 / kLanes;
  static constexpr int kMaxSweeps = 10;
  // Squared cosine between columns that a sweep may leave: convergence is quadratic, so a sweep
  // that started below it ends near fp32 rounding.
  static constexpr float kConverged = 1e-7f;
  // Below this squared cosine a rotation would only shuffle rounding errors.
  static constexpr float kOrthogonal = 1e-13f;

  float x[kSize], y[kSize];
  int x_id, y_id;  // which column of G the lane's columns descend from

  // G lies in shared memory, `pitch` floats a row.
  __device__ __forceinline__ void load(const float* matrix, int pitch) {
    x_id = threadIdx.x % kLanes;
    y_id = x_id + kLanes;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      x[i] = matrix[x_id * pitch + i];
      y[i] = matrix[y_id * pitch + i];
    }
  }

  __device__ __forceinline__ void solve() {
    bool active = true;  // of this lane's matrix: others in the warp must not change its result
    for (int sweep = 0; sweep < kMaxSweeps; ++sweep) {
      float worst = 0.f;
      for (int half = kLanes; half > 0; half /= 2) {
        if (half < kLanes) regroup(half);
        for (int round = 0; round < half; ++round) {
          if (round > 0) move(round ^ (round - 1));
          rotate(active, worst);
        }
      }
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) worst = fmaxf(worst, __shfl_xor_sync(kFullWarp, worst, step));
      active = active && worst > kConverged;
      if (!__any_sync(kFullWarp, active)) break;
    }
  }

  // Positions of the lane's two columns in descending order of eigenvalue; ties by column of G.
  __device__ __forceinline__ void rank(float x_norm, float y_norm, int& x_rank, int& y_rank) const {
    x_rank = y_rank = 0;
    for (int step = 0; step < kLanes; ++step) {
      float other_x = __shfl_xor_sync(kFullWarp, x_norm, step);
      float other_y = __shfl_xor_sync(kFullWarp, y_norm, step);
      int other_x_id = __shfl_xor_sync(kFullWarp, x_id, step);
      int other_y_id = __shfl_xor_sync(kFullWarp, y_id, step);
      x_rank += before(other_x, other_x_id, x_norm, x_id) + before(other_y, other_y_id, x_norm, x_id);
      y_rank += before(other_x, other_x_id, y_norm, y_id) + before(other_y, other_y_id, y_norm, y_id);
    }
  }

 private:
  static __device__ __forceinline__ int before(float a, int a_id, float b, int b_id) {
    return a > b || (a == b && a_id < b_id);
  }

  __device__ __forceinline__ void move(int mask) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) y[i] = __shfl_xor_sync(kFullWarp, y[i], mask);
    y_id = __shfl_xor_sync(kFullWarp, y_id, mask);
  }

  __device__ __forceinline__ void regroup(int half) {
    bool upper = threadIdx.x & half;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      float got = __shfl_xor_sync(kFullWarp, upper ? x[i] : y[i], half);
      if (upper) x[i] = got;
      else y[i] = got;
    }
    int got = __shfl_xor_sync(kFullWarp, upper ? x_id : y_id, half);
    if (upper) x_id = got;
    else y_id = got;
  }

  __device__ __forceinline__ void rotate(bool active, float& worst) {
    float xx[2] = {}, yy[2] = {}, xy[2] = {};
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      xx[i % 2] = fmaf(x[i], x[i], xx[i % 2]);
      yy[i % 2] = fmaf(y[i], y[i], yy[i % 2]);
      xy[i % 2] = fmaf(x[i], y[i], xy[i % 2]);
    }
    float alpha = xx[0] + xx[1], beta = yy[0] + yy[1], gamma = xy[0] + xy[1];
    float squared = gamma * gamma, bound = alpha * beta;
    if (squared > kConverged * bound) worst = 1.f;
    // tan of the angle that makes the two columns orthogonal; 0 where they are already.
    float zeta = __fdividef(beta - alpha, 2.f * gamma);
    float t = __fdividef(copysignf(1.f, zeta), fabsf(zeta) + sqrtf(fmaf(zeta, zeta, 1.f)));
    if (!active || !(squared > kOrthogonal * bound)) t = 0.f;
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
